"""`hf-private doctor`: which parameters of a model are covered, and the cost of training it."""
