// The model of new sessions: asks the server until a worker serves one, and offers its examples. Where workers
// serve several models or frame sizes, the user chooses.

const AGAIN_MS = 3000;
const EXAMPLES = ["a lighthouse in a storm", "a paper boat on a river"];

export class ModelChoice {
  // onModel(model): the entry of `/v1/models` whose prompts the page explains. onExample(text).
  // onRefused(problem): a key is needed. onServed(isServed): whether a worker serves any model.
  constructor(client, field, list, { onModel, onExample, onRefused, onServed }) {
    this.#client = client;
    this.#field = field;
    this.#select = field.querySelector("select");
    this.#list = list;
    this.#onModel = onModel;
    this.#onExample = onExample;
    this.#onRefused = onRefused;
    this.#onServed = onServed;
    this.#select.addEventListener("change", () => {
      this.#chosen = this.#select.value;
      this.#describe();
    });
  }

  #client;
  #field;
  #select;
  #list;
  #onModel;
  #onExample;
  #onRefused;
  #onServed;
  #timer = 0;
  /** What a new session may have: {model, size}. `size` null: the model's default one. */
  #options = [];
  /** What the list of models said when the options were made. */
  #offered = "";
  /** Label of the option that the user chose; null: none. */
  #chosen = null;
  #described = null;
  /** Model of the session on the page; null: none. */
  #playing = null;

  async find() {
    clearTimeout(this.#timer);
    try {
      const models = await this.#client.models();
      this.#offer(models);
      this.#onServed(models.length > 0);
      if (!models.some((one) => one.default)) this.#later();
    } catch (problem) {
      if (problem.status === 401) this.#onRefused(problem);
      else this.#later();
    }
  }

  /** Members of the request for a session. None for the gateway's default. */
  get request() {
    const chosen = this.#options[this.#select.selectedIndex];
    if (!chosen || (chosen.model.default && !chosen.size)) return {};
    return { model: chosen.model.id, ...(chosen.size && { width: chosen.size.width, height: chosen.size.height }) };
  }

  // A session of this model is on the page; null: none. The page explains its prompts.
  play(model) {
    this.#playing = model;
    this.#describe();
  }

  // Hide the choice while a session runs: a session keeps its model.
  show(isOffered) {
    this.#field.hidden = !isOffered || this.#options.length < 2;
  }

  #offer(models) {
    const offered = JSON.stringify(models.map(offerOf));
    if (offered === this.#offered) return;
    this.#offered = offered;
    this.#options = models.flatMap((model) =>
      (model.sizes?.length ? model.sizes : [{ default: true }]).map((size) => ({ model, size: size.default ? null : size })),
    );
    const labels = this.#options.map(({ model, size }) => label(model, size));
    this.#select.replaceChildren(...labels.map((text) => new Option(text, text)));
    const usual = this.#options.findIndex(({ model, size }) => model.default && !size);
    this.#select.selectedIndex = labels.includes(this.#chosen) ? labels.indexOf(this.#chosen) : Math.max(usual, 0);
    this.#described = null;
    this.#describe();
  }

  #describe() {
    const chosen = this.#options[this.#select.selectedIndex]?.model;
    const model = this.#options.find((one) => one.model.id === this.#playing)?.model ?? chosen;
    if (!model || model === this.#described) return;
    this.#described = model;
    this.#onModel(model);
    this.#list.replaceChildren(...(model.prompt_guide?.examples ?? EXAMPLES).map((text) => this.#item(text)));
  }

  // No worker serves the default model yet, or the server cannot be reached.
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

/** The parts of a model's entry that the page shows. Its workers and sessions change all the time. */
function offerOf({ id, default: usual, prompt_guide, controls, sizes }) {
  return [id, usual, prompt_guide, controls, sizes?.map((size) => [size.width, size.height, size.default])];
}

function label(model, size) {
  const { width, height } = size ?? model.sizes?.find((one) => one.default) ?? {};
  return width ? `${model.id}, ${width} × ${height}` : model.id;
}
