"""Types of the problem: hardware, models, profiles, templates, demand, prices, plans, transitions.

Frozen, self-checking values in seconds, bytes, tokens and USD per hour. No I/O, no solver, no Arrow, no clock.
"""
