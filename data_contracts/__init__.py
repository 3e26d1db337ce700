"""Contracts of every table that crosses a process: Arrow schema, expectations, documentation; and the gate.

Imports nothing of ours, so that other teams can use it alone.
"""
