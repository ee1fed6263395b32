"""What is published with a model: its card, the guard for uploads, and the check of a claim."""
