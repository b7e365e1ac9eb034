"""The command line ``tk-serving``: one file for each command."""

import typer

try:
    from tk_serving.cli import bench, build, demo, doctor, env, ops
except ValueError as error:  # a setting has a value that does not exist
    raise SystemExit(f"tk-serving: {error}") from None

app = typer.Typer(
    help="Kernels for DeepSeek-style models in vLLM, SGLang and transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("env")(env.env)
app.command("ops")(ops.ops)
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point of the ``tk-serving`` script."""
    app()
