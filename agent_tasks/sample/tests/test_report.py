from shop.report import add_item, format_line, load_stock, make_report


def test_line_has_name_quantity_and_total():
    assert format_line("nails", 3, 0.5).split() == ["nails", "3", "1.50"]


def test_line_without_a_name():
    assert format_line(None, 1, 2.0).startswith("unnamed")


def test_stock_is_read(tmp_path):
    file = tmp_path / "stock.json"
    file.write_text('[["nails", 3, 0.5]]')
    assert load_stock(file) == [["nails", 3, 0.5]]


def test_missing_or_broken_stock_is_empty(tmp_path):
    assert load_stock(tmp_path / "missing.json") == []
    (tmp_path / "broken.json").write_text("{")
    assert load_stock(tmp_path / "broken.json") == []


def test_an_item_is_added_at_the_end():
    assert add_item("saw", 1, 9.0, [["nails", 3, 0.5]]) == [["nails", 3, 0.5], ["saw", 1, 9.0]]


def test_report_ends_with_the_value():
    report = make_report([["nails", 3, 0.5], ["hammer", 1, 12.0]])
    assert report.splitlines()[0] == "Stock report"
    assert report.splitlines()[-1] == "total 13.50"
