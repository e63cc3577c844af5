"""What models with a closed vocabulary understand of a prompt: words by kind, a pattern, examples.

A gateway knows the workers' models by name. A distribution that brings a model offers its guide under the
entry-point group `turboserve.prompt_guides`: a mapping with the fields of `PromptGuide`. A test compares
toyworld's words with those of the shipped weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from turboserve import logs
from turboserve.gateway.public import PublicOutput
from turboserve.plugins import PluginLoadError, Plugins

log = logs.get("gateway")

_NAMED = re.compile(r"\{(\w+)\}")
"""A kind in a pattern."""


class PromptChoice(PublicOutput):
    """One thing of a kind."""

    text: str = Field(description="Text for a prompt.", examples=["moving in circles"])
    synonyms: list[str] = Field(
        description="Other texts with the same meaning.", examples=[["circling", "orbiting"]]
    )


class PromptKind(PublicOutput):
    """Things of one kind, of which a prompt names at most one for each figure."""

    kind: str = Field(description="Name of the kind.", examples=["motion"])
    default: str | None = Field(
        description="What the model shows if a prompt names none. `null`: nothing.",
        examples=["standing still"],
    )
    choices: list[PromptChoice] = Field(description="The things of this kind.")


class PromptGuide(PublicOutput):
    """What a model with a closed vocabulary understands of a prompt."""

    pattern: str = Field(
        description="A prompt with the names of the kinds in braces.", examples=["a {color} {shape} {motion}"]
    )
    subjects: list[str] = Field(
        description="Kinds of which a prompt names at least one. Otherwise the picture has no figure.",
        examples=[["color", "shape"]],
    )
    kinds: list[PromptKind] = Field(description="The kinds, in the order of the pattern.")
    other_words: list[str] = Field(
        description="Further words that the model knows, such as articles and verbs.",
        examples=[["a", "moving"]],
    )
    words_limit: int = Field(description="Number of words that are read of a prompt.", examples=[48])
    figures_limit: int = Field(description="Number of figures in a picture.", examples=[2])
    notes: list[str] = Field(
        description="How the picture differs from the prompt.",
        examples=[["Figures are never white. A white figure is shown in yellow."]],
    )
    examples: list[str] = Field(description="Prompts to begin with.", examples=[["a red circle moving left"]])

    @model_validator(mode="after")
    def _names_its_kinds(self) -> Self:
        kinds = {kind.kind for kind in self.kinds}
        for field, names in (
            ("pattern", set(_NAMED.findall(self.pattern))),
            ("subjects", set(self.subjects)),
        ):
            if missing := names - kinds:
                raise ValueError(f"{field}: no kind is named {', '.join(sorted(missing))}")
        return self


def _choices(*texts: str) -> list[PromptChoice]:
    """Each argument is a text, followed by its synonyms, all separated by `|`."""
    split = [text.split("|") for text in texts]
    return [PromptChoice(text=text, synonyms=synonyms) for text, *synonyms in split]


_TOYWORLD_OTHER_WORDS = (
    "a above across against an and around at background both by draw drift drifting drifts field flies float "
    "floating floats fly flying forever front generate go goes going high i in is landscape let make me move "
    "moves moving near next now of on one over please quality run running runs scene see show sky slide "
    "slides sliding smooth thanks that the there through together travel travelling travels under us video "
    "want which with"
)

_TOYWORLD = PromptGuide(
    pattern="a {color} {shape} {motion} over {scene}",
    subjects=["color", "shape"],
    kinds=[
        PromptKind(
            kind="color",
            default="blue",
            choices=_choices(
                "red|crimson|scarlet|ruby",
                "green|lime|emerald",
                "blue|azure|sapphire",
                "yellow|gold|golden|lemon",
                "orange|amber|tangerine",
                "purple|violet|lilac|lavender",
                "cyan|turquoise|teal|aqua",
                "pink|magenta|rose|fuchsia",
            ),
        ),
        PromptKind(
            kind="shape",
            default="circle",
            choices=_choices(
                "circle|ball|disc|dot|sphere|balloon|bubble|coin",
                "square|box|block|cube|crate|tile",
                "triangle|pyramid|tent|sail",
            ),
        ),
        PromptKind(
            kind="motion",
            default="standing still",
            choices=_choices(
                "moving left|left|leftward|leftwards",
                "moving right|right|rightward|rightwards",
                "moving up|up|upward|upwards|to the top|rising|climbing|ascending",
                "moving down|down|downward|downwards|to the bottom|falling|sinking|descending",
                "moving in circles|in circles|in a circle|in a loop|circling|circles|orbiting|round|spinning|"
                "whirling",
                "standing still|still|stationary|at rest|not moving|staying in place|stays|resting|"
                "waiting|hovering",
            ),
        ),
        PromptKind(
            kind="scene",
            default="a night sky",
            choices=_choices(
                "a night sky|night|stars|starry|space|black",
                "a snow field|snow|snowy|winter|ice|white",
                "misty mountains|mountains|hills|mist|misty|fog|foggy|gray|grey",
                "the sea|sea|ocean|waves|water|navy|navy blue|dark blue",
            ),
        ),
    ],
    other_words=_TOYWORLD_OTHER_WORDS.split(),
    words_limit=48,
    figures_limit=2,
    notes=[
        "White, gray, black and navy are colors of scenes. A white figure is shown in yellow, a navy one in "
        "blue, a gray or black one in purple."
    ],
    examples=[
        "a red circle moving left",
        "a blue square moving up over a snow field",
        "a green triangle moving in circles",
        "a pink ball standing still and a cyan box moving right over the sea",
    ],
)

PROMPT_GUIDES: Plugins[PromptGuide | Mapping[str, Any]] = Plugins(
    "prompt guide",
    "turboserve.prompt_guides",
    dict.fromkeys(("toyworld", "toyworld-live", "toyworld-small"), _TOYWORLD),
)
"""By the name of the model. A model that is not here reads any text."""


def read_prompt_guides() -> dict[str, PromptGuide]:
    """Read all installed guides. One that cannot be read is logged and left out."""
    found: dict[str, PromptGuide] = {}
    for name in PROMPT_GUIDES.names:
        try:
            found[name] = PromptGuide.model_validate(PROMPT_GUIDES.load(name))
        except (PluginLoadError, ValidationError) as error:
            log.error("prompt guide ignored", model=name, error=str(error))
    return found
