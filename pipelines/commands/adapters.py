"""`weightbeam export` of an adapter: what came of it, and the small files that PEFT and serving engines read beside its
factors.
"""

from __future__ import annotations

import dataclasses

from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.release.card import model_card
from weightbeam.formats.release.files import CARD
from weightbeam.formats.release.model_class import PIPELINE_TAGS, loading_code, model_class
from weightbeam.formats.storage import is_hub, repo_of
from weightbeam.pipelines.commands.releases import Released, card_address
from weightbeam.transforms.planning.adapter_export import AdapterExport


@dataclasses.dataclass(frozen=True, repr=False)
class ExportedAdapter(Released):
    """What came of the export of an adapter; see `Released`."""

    planned: AdapterExport

    def details(self) -> list[str]:
        folder, revision = repo_of(self.folder)
        arguments = f"{folder!r}, revision={revision!r}" if revision else repr(folder)
        return [
            f"a PEFT adapter of {self.planned.scaling}",
            f"load it:  peft.PeftModel.from_pretrained(model, {arguments})",
        ]


def small_files(planned: AdapterExport, output: str) -> dict[str, bytes]:
    """Its config and its card, whose code loads it into the release that it is for, as they are where it goes."""
    naming, base, config = planned.naming(output), planned.like.root, planned.like.config
    named = naming.name(base)
    loaded, revision = repo_of(dataclasses.replace(naming, known={}).name(base))
    title, _ = card_address(config, output, f"Adapter of {named.rpartition('/')[2]}")
    repo = repo_of(output)[0] if is_hub(output) else "."
    lines = [
        "import peft",
        "import transformers",
        "",
        f"base = {loading_code(config, loaded, revision)}",
        f"model = peft.PeftModel.from_pretrained(base, {repo!r})",
    ]
    facts = {
        "weights": naming.name(planned.source.root),
        "of": named,
        "rank": str(planned.rank),
        "alpha": f"{planned.alpha:g}",
    }
    head = {"library_name": "peft", "tags": ["lora"], "pipeline_tag": PIPELINE_TAGS.get(model_class(config))}
    if is_hub(named):
        head |= {"base_model": loaded, "base_model_relation": "adapter"}
    card = model_card(title, "\n".join(lines), facts, **head)
    return {CONFIG: planned.peft_config(loaded), CARD: card.encode()}
