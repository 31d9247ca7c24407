// The values under the pointer; without this script everything but them is there.
const points = JSON.parse(document.getElementById("points").textContent);
const tip = document.getElementById("tip");

function nearest(steps, step) {
  let best = 0;
  for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - step) < Math.abs(steps[best] - step)) best = i;
  return best;
}

function minutes(step) {
  const { steps, minutes } = points.time;
  let i = steps.findIndex((s) => s >= step);
  if (i < 0) i = steps.length - 1;
  const share = i && steps[i] > steps[i - 1] ? Math.min((step - steps[i - 1]) / (steps[i] - steps[i - 1]), 1) : 0;
  return i ? minutes[i - 1] + share * (minutes[i] - minutes[i - 1]) : minutes[0];
}

for (const plot of document.querySelectorAll(".plot")) {
  const { most, lines } = points.charts[plot.dataset.chart];
  const cross = document.createElementNS(plot.namespaceURI, "path");
  cross.setAttribute("class", "cross");
  plot.append(cross);

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const { left, right, top, bottom, width } = points.plot;
    const at = ((event.clientX - box.left) / box.width) * width;
    const wanted = (Math.min(Math.max(at, left), right) - left) / (right - left) * most;
    const ones = lines.map((line) => line.x[nearest(line.x, wanted)]);
    const step = ones[nearest(ones, wanted)];
    cross.setAttribute("d", `M${left + (step / most) * (right - left)} ${top}V${bottom}`);
    tip.replaceChildren(`step ${step.toLocaleString("en")}, ${minutes(step).toFixed(1)} min`);
    lines.forEach((line, i) => {
      const name = Object.assign(document.createElement("span"), { className: `c${line.colour}`, textContent: line.label });
      const where = ones[i] === step ? "" : ` (step ${ones[i].toLocaleString("en")})`;
      tip.append(document.createElement("br"), name, ` ${line.y[line.x.indexOf(ones[i])]}${where}`);
    });
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.pageX + 14, room))}px`;
    tip.style.top = `${event.pageY + 16}px`;
  });
  plot.addEventListener("pointerleave", () => {
    cross.removeAttribute("d");
    tip.hidden = true;
  });
}
