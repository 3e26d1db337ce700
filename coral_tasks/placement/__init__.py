"""Exact pipeline placement of node combinations (paper 4.2, design 2.2).

* ``combinations.build_tree(...) -> CombinationTree``: every multiset within N_max and the memory limit.
* ``search.solve_tree(table, tree, split) -> Solutions``: optimum of each, ``search.solve_chunk`` of a range.
* ``search.solve_vllm(...)``: the best placement that stock vLLM can carry out.
* ``check.check_solutions(...)``: recomputes placements without the search.
Owns the search; which templates are kept is ``templates``' matter. No I/O, no clock.
"""
