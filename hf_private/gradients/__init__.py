"""Per-sample gradients in one backward pass: the algebra, the book, the rules for layers, the self-check."""
