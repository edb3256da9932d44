"""Stage 2: agentic chats to packed samples, then fine-tuning with DeepSpeed."""
