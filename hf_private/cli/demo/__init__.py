"""`hf-private demo`: a private fine-tune and its card, offline."""
