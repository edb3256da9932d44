"""Retrieval over Horn clauses, the paper's model of agentic tool use (gating paper, section 4)."""
