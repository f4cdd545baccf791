def pytest_addoption(parser):
    parser.addoption(
        "--real-tokenizer", metavar="PATH", help="tokenizer.json of Gemma 4, for the tests of encodings stored from it"
    )
