// The controls under "Settings", and what of them goes into a request.

import { Trouble } from "./stream.js";

const NUMBERS = ["max_denoising_steps", "entropy_bound", "t_max", "t_min", "seed"];
const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: {
        type: "object",
        properties: { city: { type: "string", description: "The city's name" } },
        required: ["city"],
      },
    },
  },
];

export class Settings {
  constructor(byId) {
    for (const id of ["settings", "controls", "thinking", "tools", "example", "key"]) this[id] = byId(id);
    this.numbers = NUMBERS.map(byId);
    for (const slider of this.controls.querySelectorAll("[data-for]")) couple(slider, byId(slider.dataset.for));
    this.controls.addEventListener("submit", (event) => event.preventDefault());
    this.example.addEventListener("click", () => {
      this.tools.value = JSON.stringify(EXAMPLE, null, 2);
      this.tools.setSelectionRange(0, 0);
      this.tools.focus();
    });
  }

  /** The fields of a request. Throws Trouble for what cannot be sent, and leads to the field. */
  request() {
    const request = { chat_template_kwargs: { enable_thinking: this.thinking.checked } };
    for (const input of this.numbers) {
      if (!input.validity.valid) this.#refuse(input, `${input.labels[0].textContent}: ${input.validationMessage}`);
      if (input.value) request[input.id] = Number(input.value);
    }
    const tools = this.#tools();
    if (tools.length) request.tools = tools;
    return request;
  }

  #tools() {
    if (!this.tools.value.trim()) return [];
    let tools;
    try {
      tools = JSON.parse(this.tools.value);
    } catch (error) {
      this.#refuse(this.tools, `Tools are not valid JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) this.#refuse(this.tools, "Tools must be a list, [...], of functions in OpenAI's format.");
    return tools;
  }

  #refuse(input, why) {
    this.settings.open = true;
    input.focus();
    throw new Trouble(why);
  }
}

/** A slider and its number: both say the same, or the number is empty and the slider at rest. */
function couple(slider, number) {
  const rest = slider.value;
  const show = () => {
    const unset = number.value === "";
    slider.value = unset ? rest : number.value;
    slider.toggleAttribute("data-unset", unset);
    slider.setAttribute("aria-valuetext", unset ? "the server's default" : number.value);
  };
  slider.setAttribute("aria-label", number.labels[0].textContent);
  slider.addEventListener("input", () => {
    number.value = slider.value;
    show();
  });
  number.addEventListener("input", show);
  show();
}
