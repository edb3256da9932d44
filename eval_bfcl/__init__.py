"""Stage 3: tool pools, generation, scoring and the report on BFCL."""
