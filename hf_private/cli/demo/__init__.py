"""`hf-private demo`: a private fine-tune from start to card, offline."""
