"""`visitlens info`: what a recording holds and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from visitlens.app.terminal.console import counted


def info(
    recording: Annotated[str, typer.Argument(help="A recording: a folder, or s3://... .")],
    measures: Annotated[bool, typer.Option("--measures", help="List every measure with its definition.")] = False,
) -> None:
    """Say what a recording holds and where it comes from. Exit code 1 where shards are missing or cut."""
    from visitlens.hooks.recording.format.untrusted import printable
    from visitlens.hooks.recording.store.commit import readable_bytes
    from visitlens.hooks.text.encoder import document_ends
    from visitlens.probe.reading.recorded_run import absent_sentences, open_recording

    rec = open_recording(recording)
    stored, config, run = rec.recording, rec.recording.config, rec.recording.run
    rows = {
        "recording": f"{recording}  ({'damaged' if stored.damaged else 'complete' if stored.complete else 'unfinished'})",
        "model": f"{stored.provenance.get('checkpoint')}, {config['num_layers']} layers, hidden size {config['hidden_size']}, "
        f"{config['num_heads']} heads, "
        + (
            f"{config['num_experts']} experts of which {config['experts_per_token']} are used"
            if config["num_experts"]
            else "dense"
        ),
        "loop": f"layers {min(rec.plan.looped_layers)}-{max(rec.plan.looped_layers)} run {max(rec.plan.visits.values())} times, {len(rec.plan)} steps"
        if rec.looped
        else "none (unlooped)",
        "text": f"{stored.tokens:,} of {run['tokens']:,} tokens, {counted(stored.documents, 'document')} in {counted(rec.groups, 'group')}, from {stored.provenance.get('text')}",
        "level": f"{stored.level}, {run['config']['dtype']}",
        "size": f"{readable_bytes(sum(s['bytes'] for s in stored.shards))} in {counted(len(stored.shards), 'shard')}"
        + (f", {sum(s['bytes'] for s in stored.shards) / stored.tokens:,.0f} bytes a token" if stored.tokens else ""),
        "made": f"{stored.provenance.get('created')} by `{stored.provenance.get('command')}`",
        "hashes": f"config {run['config_sha256'][:12]}  weights {str(run['config']['weights_sha256'])[:12]}  data {run['config']['data_sha256'][:12]}",
    }
    if ends := document_ends(stored.provenance.get("special_tokens")):
        rows["documents"] = ends
    if isinstance(how := stored.provenance.get("generation"), dict):
        drawn = f"drawn at temperature {how.get('temperature')}, top_p {how.get('top_p')}, seed {how.get('seed')}"
        chosen = drawn if how.get("temperature") else "greedily"
        rows["generated"] = f"up to {how.get('new_tokens')} tokens a prompt, {chosen}"
    for name, value in rows.items():
        typer.echo(f"{name:<10} {printable(value)}")
    contents = {} if stored.damaged else stored.contents()
    for path, (kind, shape, size) in contents.items():
        typer.echo(f"  {path:<26} {kind} {'x'.join(map(str, shape)):<20} {readable_bytes(size)}")
    for name in stored.analyses:
        typer.echo(f"analysis   {name}")
    if stored.fetched is not None:
        typer.echo(f"copy       {stored.path}" + ("" if contents else "  (no shard in it yet)"))
    for warning in [*stored.warnings, *absent_sentences(rec)]:
        typer.echo(f"warning    {printable(warning)}")
    for note in config.get("notes", ()):
        typer.echo(f"note       {printable(note)}")
    if not measures:
        typer.echo(f"measures   {len(rec.measures)} (list them, and why others are left out, with --measures)")
    for name in rec.measures if measures else ():
        measure = rec.stat(name).measure
        typer.echo(f"\n{name} [{', '.join(measure.axes)}] in {measure.unit}\n  {measure.definition}  ({measure.paper})")
    left_out: dict[str, list[str]] = {}
    for name, why in stored.run.get("left_out", {}).items() if measures else ():
        left_out.setdefault(str(why), []).append(name)
    for why, names in left_out.items():
        typer.echo(f"\nleft out: {printable(', '.join(names))}\n  {printable(why)}")
    raise typer.Exit(1 if stored.damaged else 0)
