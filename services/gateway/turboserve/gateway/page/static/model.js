// The model of new sessions: asks the server until a worker serves one, and offers its examples.

const AGAIN_MS = 3000;
const EXAMPLES = ["a lighthouse in a storm", "a paper boat on a river"];

export class DefaultModel {
  // onModel(model): what `/v1/models` describes. onExample(text). onRefused(problem): a key is needed.
  constructor(client, list, { onModel, onExample, onRefused }) {
    this.#client = client;
    this.#list = list;
    this.#onModel = onModel;
    this.#onExample = onExample;
    this.#onRefused = onRefused;
  }

  #client;
  #list;
  #onModel;
  #onExample;
  #onRefused;
  #timer = 0;

  async find() {
    clearTimeout(this.#timer);
    try {
      const models = await this.#client.models();
      const model = models.find((one) => one.default);
      if (!model) return this.#later();
      this.#onModel(model);
      this.#list.replaceChildren(...(model.prompt_guide?.examples ?? EXAMPLES).map((text) => this.#item(text)));
    } catch (problem) {
      if (problem.status === 401) this.#onRefused(problem);
      else this.#later();
    }
  }

  // No worker is ready yet, or the server cannot be reached.
  #later() {
    this.#timer = setTimeout(() => this.find(), AGAIN_MS);
  }

  #item(text) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => this.#onExample(text));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }
}
