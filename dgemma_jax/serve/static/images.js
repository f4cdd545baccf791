// Images that go with the prompt: dropped on the page, pasted or chosen, and shown until they are sent.

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** A picture on the page; `url` is a data: URL. */
export function picture(url) {
  return Object.assign(document.createElement("img"), { src: url, alt: "An image of the prompt", className: "picture" });
}

/** The list of images beside the prompt; onrefused is told what is no image. */
export class Images {
  #urls = [];

  constructor(byId, onrefused) {
    [this.list, this.file, this.onrefused] = [byId("images"), byId("file"), onrefused];
    byId("attach").addEventListener("click", () => this.file.click());
    this.file.addEventListener("change", () => {
      this.add(this.file.files);
      this.file.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => this.#taken(event, event.clipboardData));
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => this.#taken(event, event.dataTransfer));
  }

  /** Adds the images among some files, in their order. */
  async add(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) this.onrefused(`${file.name || "That"} is no image.`);
      else this.put([...this.#urls, await read(file)]);
    }
  }

  /** Shows these data: URLs, and no others. */
  put(urls) {
    this.#urls = urls;
    this.list.replaceChildren(...urls.map((url, index) => this.#item(url, index)));
    this.list.hidden = !urls.length;
  }

  /** The data: URLs that are shown; from now on none. */
  take() {
    const urls = this.#urls;
    this.put([]);
    return urls;
  }

  #taken(event, data) {
    if (!data.files.length) return;
    event.preventDefault();
    this.add(data.files);
  }

  #item(url, index) {
    const remove = Object.assign(document.createElement("button"), {
      type: "button",
      textContent: "✕",
      onclick: () => this.put(this.#urls.filter((_, other) => other !== index)),
    });
    remove.setAttribute("aria-label", `Remove image ${index + 1}`);
    const item = document.createElement("li");
    item.append(picture(url), remove);
    return item;
  }
}

/** A prompt and its images as the content of a message. */
export function contentOf(text, urls) {
  if (!urls.length) return text;
  return [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}
