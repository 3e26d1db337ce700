"""What DAGs and the command line call: one module for each group of commands, paths in and paths out.

Joins the packages below it; holds no planning logic. Heavy libraries are imported inside functions.
"""
