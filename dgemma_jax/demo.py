"""What the bundled model shows in half a minute: `python -m dgemma_jax.demo`."""

import dgemma_jax as dg

SUDOKU = "Solve this sudoku:\n1...\n..3.\n.4..\n...2"


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny, 21 degrees"


def send_message(to: str, text: str) -> str:
    """Send a message to a person."""
    return "sent"


def set_timer(minutes: int) -> str:
    """Set a timer."""
    return "set"


TOOLS = {function.__name__: function for function in (get_weather, send_message, set_timer)}


def main() -> None:
    model = dg.load("tiny")
    ask(SUDOKU)
    for event in model.stream([user(SUDOKU)], seed=3):
        if isinstance(event, dg.Draft):
            print(f"step {event.step}\n{model.tokenizer.decode(event.tokens, skip_special=True)}", flush=True)
    print(f"{event.completion.steps[0]} denoising steps for {len(event.completion.tokens)} tokens")

    for text in (
        "Sort this list: 41, 7, 93, 12, 60, 7",
        "Repeat in upper case: a text of more than one canvas of tokens",
    ):
        ask(text)
        print(model.chat([user(text)], seed=1).content)

    text = "What is the weather in Lisbon?"
    ask(text)
    run = dg.run_tools(model, [user(text)], TOOLS, seed=1)
    for message in run.messages[1:]:
        for call in message.get("tool_calls", ()):
            print(f"call: {call['function']['name']}({call['function']['arguments']})")
        if message["role"] == "tool":
            print(f"result: {message['content']}")
    print(run.content)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(text: str) -> None:
    print(f"\n> {text}", flush=True)


if __name__ == "__main__":
    main()
