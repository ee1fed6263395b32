"""The console script `hf-private`: `main.py` lists the commands, each is a module or a folder here."""
