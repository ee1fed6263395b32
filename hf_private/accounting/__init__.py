"""What private steps cost, and how much noise or how many steps a budget allows."""
