"""What the bundled model shows in a minute: `python -m dgemma_jax.demo`."""

import dgemma_jax as dg
from dgemma_jax.program_cache import keep_programs

SUDOKU = "Solve this sudoku:\n1...\n..3.\n.4..\n...2"


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


def send_message(to: str, text: str) -> str:
    """Send a message to a person."""
    return "sent"


TOOLS = {tool.__name__: tool for tool in (get_weather, get_time, send_message)}


def main() -> None:
    keep_programs()
    print("The bundled model on this machine. Programs are compiled first: the first time that takes a minute.")
    model = dg.load("tiny")
    ask(SUDOKU)
    for event in model.stream([user(SUDOKU)], seed=3):
        if isinstance(event, dg.Draft):
            text = model.required_tokenizer.decode(event.tokens, skip_special=True)
            print(f"step {event.step}\n{text}", flush=True)
        elif isinstance(event, dg.Finished):
            print(f"{event.completion.steps[0]} denoising steps for {len(event.completion.tokens)} tokens")

    for text in ("Sort this list: 12 7 93 4 55 8", "Reverse this list: plum, cat, red", "Recite the months."):
        ask(text)
        answer = model.chat([user(text)], seed=1)
        used = answer.usage
        print(f"{answer.content}   ({used.canvases} canvases, {used.denoising_steps} steps)", flush=True)

    ask("What is the weather in Lima?", f"   (it may call {', '.join(TOOLS)})")
    run = dg.run_tools(model, [user("What is the weather in Lima?")], TOOLS, seed=1)
    for message in run.messages[1:-1]:
        for call in message.get("tool_calls", ()):
            print(f"calls {call['function']['name']} with {call['function']['arguments']}")
        if message["role"] == "tool":
            print(f"gets {message['content']}")
    print(run.content)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(text: str, note: str = "") -> None:
    print(f"\n> {text}{note}", flush=True)


if __name__ == "__main__":
    main()
