"""What the bundled model shows in half a minute: `python -m dgemma_jax.demo`."""

import dgemma_jax as dg

SUDOKU = "Solve this sudoku:\n1...\n..3.\n.4..\n...2"


def main() -> None:
    model = dg.load("tiny")
    ask(SUDOKU)
    for event in model.stream([user(SUDOKU)], seed=3):
        if isinstance(event, dg.Draft):
            print(f"step {event.step}\n{model.tokenizer.decode(event.tokens, skip_special=True)}", flush=True)
    print(f"{event.completion.steps[0]} denoising steps for {len(event.completion.tokens)} tokens")

    for text in ("Reverse this list: 12 7 93 4 55 8", "Reverse q w e r t y"):
        ask(text)
        print(model.chat([user(text)], seed=1).content)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(text: str) -> None:
    print(f"\n> {text}", flush=True)


if __name__ == "__main__":
    main()
