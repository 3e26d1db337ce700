"""Pages and pictures for people: self-contained HTML with plotly from its own package, no address outside.

Owns looks only: every figure comes in ready. Everything shown is escaped.
"""
