"""One private step: draw, clip, add up, add noise."""
