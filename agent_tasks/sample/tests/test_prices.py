import pytest
from shop.prices import average_price, basket_total, cheapest, with_tax


def test_tax_is_added():
    assert with_tax(100.0) == 119.0


def test_discount_is_taken_from_the_sum():
    assert basket_total([10.0, 20.0], discount=0.5) == 15.0


def test_discount_over_one_is_refused():
    with pytest.raises(ValueError, match="discount"):
        basket_total([10.0], discount=1.5)


def test_average_of_prices():
    assert average_price([1.0, 2.0, 6.0]) == 3.0


def test_average_of_no_prices_is_zero():
    assert average_price([]) == 0.0


def test_cheapest():
    assert cheapest([3.0, 1.0, 2.0]) == 1.0
    assert cheapest([]) is None
