"""The canvas page's files, without a browser."""

import re

from tests.serve.fake_server import STATIC


def test_the_files_need_nothing_from_elsewhere_and_set_no_markup():
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    for name, text in files.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", text), (
            name
        )
        assert not re.search(r"(?<!xmlns=\")https?://|@import|url\((?!#)", text), name
    html = files["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    linked = set(re.findall(r'(?:href|src)="static/([^"]+)"', html))
    imported = {name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported | {"index.html"} == set(files)
