"""Thin wrappers of the mathematical solvers: HiGHS from arrays, and HiGHS, CBC or Gurobi through PuLP.

Owns how a program is handed to a solver and how its answer is judged; knows nothing of models, nodes or plans.

- ``mip.ArrayProgram``: a mixed integer program as arrays; ``mip.solve_arrays`` hands it to HiGHS directly.
- ``mip.ProgramBuilder``: collects columns and named rows into an ``ArrayProgram``.
- ``mip.build_pulp``, ``mip.solve_pulp``: the same program, or any ``pulp.LpProblem``, through PuLP.
- ``mip.MipResult``: typed outcome; ``values`` is None unless the solver truly holds a feasible solution.
"""
