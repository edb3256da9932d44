"""The controlled experiments that explain what gates do."""
