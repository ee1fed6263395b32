"""Real privacy bugs, each a small patch of our code, and the test that must catch it; see table.py and __main__.py."""
