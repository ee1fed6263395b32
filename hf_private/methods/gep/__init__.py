"""GEP: gradients embedded in a subspace of public data."""
