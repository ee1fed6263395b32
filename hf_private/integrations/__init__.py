"""Private versions of other libraries' trainers. Each needs an extra: `pip install 'hf-private[trl]'`."""
