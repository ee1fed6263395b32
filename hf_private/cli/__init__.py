"""The command line: `hf-private`, one module or folder per command."""
