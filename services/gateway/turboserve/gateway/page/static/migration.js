// Shows which worker runs the session. Where another worker is ready, offers to migrate the session to it.

const LOOK_MS = 3000;

export class MigrationForm {
  constructor(client, form, field, attempt) {
    this.#client = client;
    this.#form = form;
    this.#field = field;
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      if (this.#target) return;
      attempt(() => this.#migrate());
    });
    setInterval(() => this.#look(), LOOK_MS);
  }

  #client;
  #form;
  #field;
  #session = null;
  #newestEvent = 0;
  #worker = null;
  #target = null;
  #others = [];

  // The player's state of the session; null: there is none.
  learn(session, { worker, target, newestEvent } = {}) {
    // An event that the answer to a migration has overtaken, of which the player does not know.
    if (session === this.#session && newestEvent < this.#newestEvent) return;
    const isNews = session !== this.#session || worker !== this.#worker;
    this.#session = session;
    this.#worker = worker ?? null;
    this.#target = target ?? null;
    this.#newestEvent = newestEvent ?? 0;
    this.#show();
    if (isNews) this.#look();
  }

  async #migrate() {
    const started = await this.#client.session(this.#session).migrate(this.#select.value);
    // A late answer: the migration may have ended by now.
    if (started.session !== this.#session || started.newest_event < this.#newestEvent) return;
    this.learn(this.#session, { ...started, newestEvent: started.newest_event });
  }

  async #look() {
    if (!this.#session || document.hidden) return;
    const workers = await this.#client.workers().catch(() => []);
    const mine = workers.find((worker) => worker.id === this.#worker);
    this.#others = workers.filter(
      (worker) => mine && worker.phase === "ready" && worker.id !== this.#worker && served(worker) === served(mine),
    );
    this.#show();
  }

  get #select() {
    return this.#form.querySelector("select");
  }

  #show() {
    const { textContent } = this.#field;
    const migrating = this.#target ? ` → ${this.#target}` : "";
    const text = this.#worker ? this.#worker + migrating : "–";
    if (textContent !== text) this.#field.textContent = text;
    this.#field.title = text;
    document.body.dataset.target = this.#target ?? "";
    this.#form.hidden = !this.#session || !this.#worker || this.#others.length === 0;
    // Not `disabled`: the keyboard's focus would fall to the page's beginning.
    this.#form.querySelector("button").setAttribute("aria-disabled", String(Boolean(this.#target)));
    const chosen = this.#select.value;
    const places = this.#others.map((worker) => {
      const used = worker.sessions + worker.incoming;
      return { id: worker.id, text: `${worker.id} (${used} of ${worker.capacity})` };
    });
    const options = [{ id: "", text: "the best worker" }, ...places];
    if (options.map((option) => option.text).join() === this.#shown) return;
    this.#shown = options.map((option) => option.text).join();
    this.#select.replaceChildren(...options.map(({ id, text }) => new Option(text, id)));
    if (options.some((option) => option.id === chosen)) this.#select.value = chosen;
  }

  #shown = "";
}

/** What a worker generates. A session only goes where the same is generated. */
function served({ model, width, height }) {
  return `${model} ${width}x${height}`;
}
