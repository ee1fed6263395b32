"""`hf-private doctor`: which parameters of a model are covered, and what training it costs."""
