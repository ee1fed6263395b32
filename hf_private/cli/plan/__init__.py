"""`hf-private plan`: from a budget, a number of records and a model to settings."""
