"""The trace page: a self-contained HTML file that shows which step committed each token and replays the denoising."""

import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = 64  # more steps than this share colours with their neighbours
LIGHT_RAMP = ((0.74, 0.110, 300.0), (0.92, 0.110, 100.0))  # OKLCH (lightness, chroma, hue) of the first and last step
DARK_RAMP = ((0.40, 0.075, 300.0), (0.54, 0.075, 100.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One prompt's decoding. pieces, steps, confidences and rules have one entry a generated token, in text order.

    prompt: the prompt's text. pieces: the tokens' texts. steps: the denoising step that committed each, from 0.
    confidences: its probability then. rules: what committed it. method and settings are shown as they are.
    """

    prompt: str
    pieces: Sequence[str]
    steps: Sequence[int]
    confidences: Sequence[float]
    rules: Sequence[str]
    method: str
    settings: Mapping[str, object]

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in ("pieces", "steps", "confidences", "rules")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a trace has one entry a token in each of its lists, got {lengths}")
        if any(step < 0 for step in self.steps):
            raise ValueError(f"steps count from 0, got {min(self.steps)}: leave out tokens that were never committed")


def write_trace(path: str | Path, traces: Sequence[Trace], *, title: str = "Denoising trace") -> None:
    """Write the page of one or more traces, a section each; the file appears whole or not at all.

    The address may end in #step=12 to open at a step. Raises ValueError where path cannot be written.
    """
    path = check_trace_path(path)
    # A lone surrogate, from a command line that is not UTF-8, cannot be encoded: it becomes a question mark.
    page = trace_page(traces, title=title).encode("utf-8", errors="replace")
    temporary = path.with_name(f".{os.getpid()}.trace.tmp")
    try:
        temporary.write_bytes(page)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write the trace to {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_trace_path(path: str | Path) -> Path:
    """The file that a trace at path would be written to. Raises ValueError where there can be none; writes nothing."""
    path = Path(path).resolve()
    if not os.path.isdir(path.parent):
        raise ValueError(f"cannot write the trace to {path}: the folder {path.parent} does not exist")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot write the trace to {path}: it is not a file; name one, such as trace.html")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write the trace to {path}: the folder {path.parent} is not writable")
    return path


def trace_page(traces: Sequence[Trace], *, title: str = "Denoising trace") -> str:
    """The page as a string of HTML. It asks nothing of the network and shows every token without scripts too."""
    sections = "".join(_section(trace, number) for number, trace in enumerate(traces, 1))
    light, dark = (_colour_rules(ramp(*ends)) for ends in (LIGHT_RAMP, DARK_RAMP))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(title)}</title>"
        f"<style>{STYLE}{light}@media (prefers-color-scheme: dark) {{{dark}}}</style></head>\n"
        f'<body><main><h1>{_text(title)}</h1>{_legend()}\n{sections}</main><div id="tip" role="tooltip" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def ramp(first: tuple[float, float, float], last: tuple[float, float, float]) -> list[tuple[float, float, float]]:
    """COLOURS sRGB colours in [0, 1], evenly spaced in OKLCH, so that equal differences of step look equally large."""
    colours = []
    for i in range(COLOURS):
        lightness, chroma, hue = (a + (b - a) * i / (COLOURS - 1) for a, b in zip(first, last, strict=True))
        a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
        # OKLab to linear sRGB: the matrices of its definition (Ottosson 2020).
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        linear = (
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
        )
        red, green, blue = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear)
        colours.append((red, green, blue))
    return colours


def _colour_rules(colours: Sequence[tuple[float, float, float]]) -> str:
    channels = [[round(255 * min(max(v, 0.0), 1.0)) for v in colour] for colour in colours]
    return "".join(f".c{i}{{background:#{r:02x}{g:02x}{b:02x}}}" for i, (r, g, b) in enumerate(channels))


def _legend() -> str:
    swatches = "".join(f'<i class="c{i}"></i>' for i in range(0, COLOURS, 3))
    return (
        f'<p class="legend">Colour: the step that committed the token, first '
        f'<span aria-hidden="true">{swatches}</span> last. Bars: tokens committed by each step. '
        "Hover over a token, or move to it with the arrow keys, for its confidence.</p>"
    )


def _section(trace: Trace, number: int) -> str:
    steps = max(trace.steps, default=-1) + 1
    counts = [0] * steps
    for step in trace.steps:
        counts[step] += 1
    off = "" if steps else " disabled"
    bars = "".join(
        f'<i class="{_colour(step, steps)}" style="height:{100 * count / max(counts):.1f}%"></i>'
        for step, count in enumerate(counts)
    )
    settings = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in {"method": trace.method, **trace.settings}.items()
    )
    tokens = "".join(
        _token(*entry, steps=steps)
        for entry in zip(trace.pieces, trace.steps, trace.confidences, trace.rules, strict=True)
    )
    return (
        f'<section aria-label="Prompt {number}" data-steps="{steps}">'
        f"<details{' open' if len(trace.prompt) <= 600 else ''}><summary>Prompt {number}</summary>"
        f'<div class="prompt">{_text(trace.prompt)}</div></details>\n'
        f'<div class="answer" role="group" aria-label="Answer; arrow keys move from token to token">{tokens}</div>\n'
        f'<div class="replay"><button type="button"{off}>Play</button><div class="scale">'
        f'<div class="bars" aria-hidden="true" style="gap:{1 if steps <= 100 else 0}px">{bars}</div>'
        f'<input type="range" min="0" max="{steps}" value="{steps}" aria-label="Steps done"{off}></div>'
        f"<output>{_plural(steps, 'step')}<br><small>{_plural(len(trace.pieces), 'token')}</small></output></div>\n"
        f"<dl>{settings}</dl></section>\n"
    )


def _token(piece: str, step: int, confidence: float, rule: str, *, steps: int) -> str:
    """A token's span. A leading space and trailing line ends stand outside it, where they break lines unpainted."""
    body = piece.rstrip("\n")
    lines = len(piece) - len(body)
    space = " " if body.startswith(" ") and body.strip() else ""
    mark = f' data-mark="{"↵" * lines}"' if lines else ' data-mark="∅"' if not body else ""
    return (
        f'{space}<span class="t {_colour(step, steps)}" data-step="{step}" data-confidence="{float(confidence)!r}" '
        f'data-rule="{_text(rule)}"{mark} title="step {step + 1}, confidence {confidence:.3f}, {_text(rule)}">'
        f"{_text(body.removeprefix(space))}</span>" + "\n" * lines
    )


def _colour(step: int, steps: int) -> str:
    return f"c{round(step / max(steps - 1, 1) * (COLOURS - 1))}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _text(value: object) -> str:
    """Escaped for HTML text and quoted attributes; control characters, which HTML cannot hold, as their pictures."""
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
    return html.escape(str(value).translate(pictures))


STYLE = """
:root { --page:#fbfbfa; --ink:#1b1b1f; --soft:#63636b; --line:#d9d9d6; --card:#ffffff; --accent:#4b3fbf }
@media (prefers-color-scheme: dark) {
  :root { --page:#131316; --ink:#f4f4f2; --soft:#a3a3ab; --line:#35353b; --card:#1b1b1f; --accent:#a79dff } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.5 system-ui,sans-serif }
main { max-width:54rem; margin:0 auto; padding:2rem 1.25rem 4rem }
h1 { font-size:1.25rem; margin:0 }
i { -webkit-print-color-adjust:exact; print-color-adjust:exact }
.legend { color:var(--soft); font-size:.85rem; margin:.25rem 0 1.25rem }
.legend span { display:inline-flex; width:7rem; height:.75rem; border-radius:3px; overflow:hidden;
  vertical-align:-.05rem }
.legend i { flex:1 }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; margin:0 0 1.5rem; padding:1.25rem }
summary { color:var(--soft); font-size:.85rem; cursor:pointer }
.prompt { white-space:pre-wrap; overflow-wrap:anywhere; max-height:16rem; overflow:auto; margin:.4rem 0 0 }
.answer { white-space:pre-wrap; overflow-wrap:anywhere; font:.95rem/1.9 ui-monospace,Menlo,Consolas,monospace;
  border-top:1px solid var(--line); margin:1rem 0 0; padding:1rem 0 }
.t { border-radius:4px; padding:.15em 1px; margin:0 1px; -webkit-box-decoration-break:clone;
  box-decoration-break:clone; -webkit-print-color-adjust:exact; print-color-adjust:exact }
.answer:empty::after { content:"nothing was generated"; color:var(--soft) }
.t[data-mark]::after { content:attr(data-mark); opacity:.6 }
.t.new { box-shadow:0 0 0 2px var(--ink) }
.t.mask { color:transparent; user-select:none; box-shadow:inset 0 0 0 1px var(--line);
  background:repeating-linear-gradient(-45deg,transparent 0 3px,var(--line) 3px 4px) }
.t:focus-visible,button:focus-visible,summary:focus-visible { outline:2px solid var(--accent); outline-offset:2px }
.replay { display:flex; align-items:end; gap:1rem; position:sticky; bottom:0; background:var(--card); padding:.75rem 0;
  border-top:1px solid var(--line) }
.scale { flex:1; min-width:0 }
.bars { display:flex; align-items:end; height:2.25rem; padding:0 8px; border-bottom:1px solid var(--line) }
.bars i { flex:1; min-width:0; border-radius:1px 1px 0 0 }
.bars i.later { opacity:.35 }
input { display:block; width:100%; height:24px; margin:0; accent-color:var(--accent) }
button { font:inherit; min-width:5.5rem; padding:.4rem .9rem; border-radius:7px; border:1px solid var(--line);
  background:var(--page); color:var(--ink); cursor:pointer }
button:disabled { opacity:.5; cursor:default }
output { min-width:8.5rem; text-align:right; line-height:1.25; font-variant-numeric:tabular-nums }
small { color:var(--soft); font-size:.8rem }
dl { display:flex; flex-wrap:wrap; gap:.35rem 1.25rem; margin:0; font-size:.85rem; border-top:1px solid var(--line);
  padding-top:.75rem }
dl div { display:flex; gap:.4rem } dt { color:var(--soft) } dd { margin:0; overflow-wrap:anywhere }
#tip { position:fixed; z-index:1; pointer-events:none; background:var(--ink); color:var(--page); border-radius:6px;
  padding:.3rem .6rem; font-size:.85rem; max-width:calc(100vw - 16px) }
@media (max-width:34rem) { .replay { flex-wrap:wrap } .scale { order:-1; flex-basis:100% } output { margin-left:auto } }
"""

SCRIPT = """
const tip = document.getElementById('tip');
function showTip(token) {
  const {step, confidence, rule} = token.dataset;
  tip.textContent = `step ${+step + 1} \\u00b7 confidence ${(+confidence).toFixed(3)} \\u00b7 ${rule}`;
  tip.hidden = false;
  const box = token.getClientRects()[0], height = tip.offsetHeight;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = (box.top > height + 10 ? box.top - height - 6 : box.bottom + 6) + 'px';
}
function hideTip() { tip.hidden = true; }
addEventListener('scroll', hideTip, true);

const sections = [...document.querySelectorAll('section')].map(section => {
  const [slider, button, output] = ['input', 'button', 'output'].map(name => section.querySelector(name));
  const tokens = [...section.querySelectorAll('.t')], bars = [...section.querySelectorAll('.bars i')];
  const steps = +section.dataset.steps;
  let timer = 0;
  function show(done) {
    let shown = 0;
    for (const token of tokens) {
      const step = +token.dataset.step;
      token.classList.toggle('mask', step >= done);
      token.classList.toggle('new', step === done - 1 && done < steps);
      shown += step < done;
    }
    bars.forEach((bar, step) => bar.classList.toggle('later', step >= done));
    slider.value = done;
    slider.setAttribute('aria-valuetext', `${done} of ${steps} steps, ${shown} of ${tokens.length} tokens`);
    output.innerHTML = `step ${done} of ${steps}<br><small>${shown} of ${tokens.length} tokens</small>`;
  }
  function pause() { clearInterval(timer); timer = 0; button.textContent = 'Play'; }
  function play() {
    if (+slider.value >= steps) show(0);
    button.textContent = 'Pause';
    timer = setInterval(() => {
      show(+slider.value + 1);
      if (+slider.value >= steps) pause();
    }, Math.max(40, Math.min(400, 8000 / steps)));
  }
  button.addEventListener('click', () => timer ? pause() : play());
  slider.addEventListener('input', () => { pause(); show(+slider.value); });

  tokens.forEach((token, index) => {
    token.removeAttribute('title');
    token.tabIndex = index ? -1 : 0;
    token.setAttribute('aria-describedby', 'tip');
    for (const event of ['mouseenter', 'focus']) token.addEventListener(event, () => showTip(token));
    for (const event of ['mouseleave', 'blur']) token.addEventListener(event, hideTip);
    token.addEventListener('keydown', event => {
      const to = {ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: tokens.length - 1}[event.key];
      if (!tokens[to]) return;
      event.preventDefault();
      token.tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    });
  });
  return {show, pause, steps};
});

function showAddress() {
  const step = /[#&]step=(\\d+)/.exec(location.hash);
  for (const section of sections) {
    section.pause();
    section.show(step ? Math.min(+step[1], section.steps) : section.steps);
  }
}
addEventListener('hashchange', showAddress);
showAddress();
"""
