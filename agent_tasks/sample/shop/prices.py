"""Prices of single items and of whole baskets, in euros."""

from collections.abc import Sequence


def with_tax(price: float, rate: float = 0.19) -> float:
    """The price a customer pays."""
    return round(price * (1 + rate), 2)


def basket_total(prices: Sequence[float], discount: float = 0.0) -> float:
    """The sum of the prices, less a discount between 0 and 1."""
    if not 0 <= discount <= 1:
        raise ValueError("the discount is not between 0 and 1")
    return round(sum(prices) * (1 - discount), 2)


def average_price(prices: Sequence[float]) -> float:
    """The mean price, or 0.0 when there are no prices."""
    return round(sum(prices) / len(prices), 2)


def cheapest(prices: Sequence[float]) -> float | None:
    """The lowest price, or None when there are no prices."""
    return min(prices, default=None)
