"""Multi-token key-value retrieval with a perturbed dictionary (gating paper, section 3)."""
