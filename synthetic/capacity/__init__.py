"""How many facts a state can hold: associative recall, the law that predicts it, its circuits.

`tasks` draws the sequences, `linear_mamba` and `full_mamba` are the trained models, `designed`
the circuits of theorems 3.1 and 3.2 that need no training, `operators` looks inside a trained
model.  The law itself is `gatewright.recall_law`: the planner and the BFCL report use it too.
"""
