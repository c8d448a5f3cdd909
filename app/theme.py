"""How the page looks: a Gradio theme, and the one style sheet beside this file."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
from gradio.themes.utils import colors, fonts, sizes

STYLE_SHEET = Path(__file__).with_name("page.css")

ACCENT = "#0072b2"
"""The blue of the Run button and of what is selected; it has 5.2:1 against white."""

_BLUE = colors.Color(
    name="lab_blue",
    c50="#eef6fb", c100="#d6eaf5", c200="#add5ea", c300="#7ab9db", c400="#3d97c8",
    c500=ACCENT, c600="#00639b", c700="#005382", c800="#004268", c900="#00334f", c950="#00223a",
)  # fmt: skip


def theme() -> gr.themes.Base:
    """Calm greys, one blue, and fonts that come with Gradio or the system (C10)."""
    look = gr.themes.Base(
        primary_hue=_BLUE,
        secondary_hue=_BLUE,
        neutral_hue=colors.gray,
        spacing_size=sizes.spacing_sm,
        radius_size=sizes.radius_md,
        text_size=sizes.text_sm,
        font=(fonts.LocalFont("IBM Plex Sans", weights=(400, 700)), "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    )
    look.set(
        body_background_fill="#f6f8fa",
        body_text_color="#1b2430",
        body_text_color_subdued="#667180",
        block_background_fill="white",
        block_border_width="0px",
        block_shadow="none",
        block_title_text_color="#667180",
        block_title_text_weight="400",
        block_title_text_size="*text_sm",
        block_info_text_color="#667180",
        block_info_text_size="11px",
        block_padding="0px",
        border_color_primary="#e1e6eb",
        input_border_width="1px",
        input_border_color="#dde3e9",
        input_background_fill="white",
        input_shadow="none",
        input_shadow_focus="0 0 0 3px #d6eaf5",
        input_border_color_focus=ACCENT,
        input_radius="8px",
        button_primary_background_fill=ACCENT,
        button_primary_background_fill_hover="#00639b",
        button_primary_text_color="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_hover="#f2f5f8",
        button_secondary_border_color="#dde3e9",
        button_secondary_text_color="#1b2430",
        button_border_width="1px",
        button_large_radius="8px",
        button_large_text_size="*text_sm",
        button_large_padding="9px 14px",
        button_small_radius="8px",
        form_gap_width="0px",
        layout_gap="10px",
        shadow_drop="none",
        shadow_drop_lg="none",
    )
    # Cards and charts are drawn on light grounds: a dark browser gets the same page.
    for name in vars(look).copy():
        if name.endswith("_dark"):
            setattr(look, name, getattr(look, name.removesuffix("_dark"), None))
    return look
