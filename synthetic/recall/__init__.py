"""Recall in fixed-state recurrences: cells, tasks, curricula and the tests between them.

`cells` holds the cells (their one state update is `gatewright.rank_one_scan`); `model` the
harness around them, on `fused` kernels where there are any; `tasks` the sequences and their
honest floors; `curriculum` the distance schedules; `runs` training and measurement; `arms` the
settings of the table; `resume` what a folder still lacks; `claims` every number and claim of the
paper's summary; `judge` the verdicts; `table` all of them beside ours.
"""
