"""How many instances of which template run where: problem, exact anytime solver, certificate, check, explanation.

- ``problem.AllocationProblem``: validated arrays; ``build.build_problem`` makes it from domain rows.
- ``solve.solve_allocation(problem, time_limit_s=…, gap=…, previous=…)`` -> ``AllocationPlan``.
- ``check.check_plan(problem, plan)``: recomputes everything without solver or program; raises nothing, reports.
- ``explain``: cost shares, what binds, what options cost, what is short.
- ``instances``: instances in the format of the reference oracle.
"""
