// Links to one session: the one in the address of a shared page, and the dialog that makes one.

/** What the address names, `#session=ID&link=TOKEN`; null: no link. The browser does not send this part. */
export function sharedLink() {
  const names = new URLSearchParams(location.hash.slice(1));
  const [session, token] = [names.get("session"), names.get("link")];
  return session && token ? { session, token } : null;
}

/** Makes links with which others may watch. `attempt` (action): runs an action and shows its problem. */
export class ShareDialog {
  constructor(client, dialog, attempt) {
    this.#client = client;
    this.#dialog = dialog;
    this.#attempt = attempt;
    this.#at("copy").addEventListener("click", () => this.#copy());
    this.#at("revoke").addEventListener("click", () => this.#revoke());
  }

  #client;
  #dialog;
  #attempt;
  #session = null;
  #link = null;

  async open(session) {
    this.#session = this.#client.session(session);
    this.#link = await this.#session.share({ role: "viewer" });
    // A proxy may serve the gateway below a path of its own.
    this.#at("url").value = new URL(this.#link.url.slice(1), this.#client.baseUrl).href;
    this.#at("state").textContent = `Anyone with this link can watch until ${when(this.#link.expires_at)}.`;
    this.#at("copy").hidden = this.#at("revoke").hidden = false;
    this.#dialog.showModal();
    this.#at("url").select();
  }

  async #copy() {
    this.#at("url").select();
    try {
      await navigator.clipboard.writeText(this.#at("url").value);
      this.#at("state").textContent = "Copied.";
    } catch {
      // The clipboard needs a secure context, which a page over plain HTTP is not. The text is selected.
      this.#at("state").textContent = "Copy the selected text.";
    }
  }

  #revoke() {
    this.#attempt(async () => {
      await this.#session.revokeLink(this.#link.id);
      this.#at("state").textContent = "Revoked. The link no longer works.";
      this.#at("copy").hidden = this.#at("revoke").hidden = true;
    });
  }

  #at(name) {
    return this.#dialog.querySelector(`[data-part=${name}]`);
  }
}

function when(time) {
  return new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
