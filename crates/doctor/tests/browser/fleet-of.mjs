// Extends the map that a real controller sent to any number of nodes: the same columns and words, more rows, in racks.

export function fleetOf(map, count) {
  const perRack = 16;
  const racks = Array.from({ length: Math.ceil(count / perRack) }, (_, rack) => `r${String(rack + 1).padStart(3, "0")}`);
  const at = Object.fromEntries(map.columns.map((name, place) => [name, place]));
  const nodes = Array.from({ length: count }, (_, number) => {
    const row = [...map.nodes[number % map.nodes.length]];
    row[at.rack] = Math.floor(number / perRack);
    row[at.node] = `${racks[row[at.rack]]}-node${String(number + 1).padStart(5, "0")}`;
    return row;
  });
  return { ...map, racks, nodes };
}
