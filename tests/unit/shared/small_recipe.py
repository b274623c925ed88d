"""The Dockerfile that a test needs, as the template of its checkout: what is built follows from it.

In: a checkout, a stack, a Dockerfile text. Out: the generated files, as `stackcheck render` writes them.
"""

from pathlib import Path

from stackcheck.matrix.stack import Stack
from stackcheck.recipe import render


def render_from(dockerfile: str, stack: Stack, checkout: Path) -> Path:
    """Make a text the checkout's template, and render a stack with it; the stack's folder."""
    images = checkout / "images"
    images.mkdir(parents=True, exist_ok=True)
    (images / render.template_name(stack)).write_text(dockerfile)
    render.write((stack,), images)
    return images / stack.id
