'use strict';
// The page is complete without this script; it adds the filters, and shows a cell's cases when the cell is chosen.
const form = document.getElementById('filters');
const count = document.getElementById('count');
const rows = [...document.querySelectorAll('.cases > li')];
const field = name => document.getElementById('f-' + name);
function apply() {
  const text = field('text').value.trim().toLowerCase();
  const outcome = field('outcome').value;
  let shown = 0;
  for (const row of rows) {
    const data = row.dataset;
    const hit = (!text || data.id.includes(text))
      && (!outcome || data.outcome === outcome || (outcome === 'short' && data.short === '1'))
      && ['ratio', 'mode', 'device'].every(name => !field(name).value || data[name] === field(name).value);
    row.hidden = !hit;
    shown += hit;
  }
  count.textContent = shown + ' of ' + rows.length + ' cases shown';
}
form.hidden = false;
form.addEventListener('input', apply);
form.addEventListener('reset', () => setTimeout(apply));
form.addEventListener('submit', event => event.preventDefault());
for (const link of document.querySelectorAll('td a')) {
  link.addEventListener('click', event => {
    event.preventDefault();
    form.reset();
    for (const name of ['ratio', 'mode', 'device']) field(name).value = link.dataset[name];
    apply();
    const first = rows.find(row => !row.hidden);
    document.getElementById('cases').scrollIntoView();
    if (first) {
      const target = first.querySelector('summary') || first;
      target.focus({preventScroll: true});
    }
  });
}
apply();
