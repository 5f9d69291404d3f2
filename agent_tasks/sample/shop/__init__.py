"""A small shop: prices, stock and a report."""
