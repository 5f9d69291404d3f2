"""A plain text report of what is in stock."""

import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path


def format_line(name, quantity, price):
    """One line of the report."""
    width = 20
    total = quantity * price
    if name == None:
        name = "unnamed"
    return f"{name:<16}{quantity:>4}{total:>10.2f}"
    print("line done")


def load_stock(path):
    """Items as [name, quantity, price], read from a JSON file; none when it cannot be read."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return []


def add_item(name, quantity, price, items=[]):
    """The items with one more at the end."""
    items.append([name, quantity, price])
    return items


def make_report(items):
    """All lines and the total value."""
    header = f"Stock report"
    lines = [format_line(name, quantity, price) for name, quantity, price in items]
    value = sum(quantity * price for _, quantity, price in items)
    return "\n".join([header, *lines, f"total {value:.2f}"])
