//! Plots as inline SVG: bars over time, without scripts, with a text description for screen readers.

use std::fmt::Write;

/// One row of a stack: its name, its CSS class, and a value per label.
#[derive(Debug)]
pub(super) struct PlotSeries<'a> {
    pub(super) name: &'a str,
    pub(super) class: &'a str,
    pub(super) values: Vec<f64>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 140.0;
const LEFT: f64 = 48.0;
const BOTTOM: f64 = 18.0;
const TOP: f64 = 8.0;

/// Draws stacked bars. Each of `labels` is a tooltip, and a few are drawn.
pub(super) fn bars(title: &str, labels: &[String], rows: &[PlotSeries<'_>]) -> String {
    let sums: Vec<f64> = (0..labels.len()).map(|index| rows.iter().map(|row| value(row, index)).sum()).collect();
    let max = sums.iter().copied().fold(0.0, f64::max);
    let total = |row: &PlotSeries<'_>| format!("{} {}", short(row.values.iter().sum()), row.name);
    let descriptions: Vec<String> = rows.iter().map(total).collect();
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}: {}\">",
        escaped(title),
        escaped(&descriptions.join(", "))
    );
    let bottom = HEIGHT - BOTTOM;
    let scale = |value: f64| if max > 0.0 { value / max * (bottom - TOP) } else { 0.0 };
    line(&mut svg, LEFT, bottom, WIDTH, bottom);
    line(&mut svg, LEFT, TOP, WIDTH, TOP);
    text_element(&mut svg, LEFT - 6.0, bottom, "end", "0");
    if max > 0.0 {
        text_element(&mut svg, LEFT - 6.0, TOP + 8.0, "end", &short(max));
    } else {
        text_element(&mut svg, LEFT + 6.0, HEIGHT / 2.0, "start", "none");
    }
    let step = (WIDTH - LEFT) / float(labels.len().max(1));
    for (index, name) in labels.iter().enumerate() {
        let x = LEFT + step * float(index);
        let mut y = bottom;
        for row in rows.iter().filter(|row| value(row, index) > 0.0) {
            let height = scale(value(row, index));
            y -= height;
            let tip = format!("{name}: {} {}", short(value(row, index)), row.name);
            // Writing to a String does not fail.
            let _written = write!(
                svg,
                "<rect class=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
                row.class,
                (step - 1.0).max(1.0),
                escaped(&tip)
            );
        }
        // At most six labels fit.
        if index % labels.len().div_ceil(6).max(1) == 0 {
            text_element(&mut svg, x, HEIGHT - 4.0, "start", name);
        }
    }
    svg.push_str("</svg>");
    svg
}

/// Formats the legend of a plot, with the total of each row.
pub(super) fn legend(rows: &[PlotSeries<'_>]) -> String {
    let one = |row: &PlotSeries<'_>| {
        let (class, total) = (row.class, short(row.values.iter().sum()));
        let swatch = format!(
            "<svg viewBox=\"0 0 10 10\" aria-hidden=\"true\"><rect class=\"{class}\" width=\"10\" height=\"10\"/></svg>"
        );
        format!("{swatch}{total} {}", escaped(row.name))
    };
    format!("<p class=\"legend\">{}</p>", rows.iter().map(one).collect::<String>())
}

/// Draws one bar of parts that add up to a whole, for a table cell.
pub(super) fn share(parts: &[(&str, &str, u32)]) -> String {
    let total: u32 = parts.iter().map(|(_, _, count)| count).sum();
    let mut svg = "<svg class=\"share\" viewBox=\"0 0 200 12\" role=\"img\" aria-label=\"".to_owned();
    let descriptions: Vec<String> = parts.iter().map(|(name, _, count)| format!("{count} {name}")).collect();
    svg.push_str(&escaped(&descriptions.join(", ")));
    svg.push_str("\">");
    let mut x = 0.0;
    for (name, class, count) in parts.iter().filter(|(_, _, count)| *count > 0) {
        let width = 200.0 * f64::from(*count) / f64::from(total);
        let _written = write!(
            svg,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"0\" width=\"{width:.1}\" height=\"12\"><title>{count} {}</title></rect>",
            escaped(name)
        );
        x += width;
    }
    svg.push_str("</svg>");
    svg
}

fn value(row: &PlotSeries<'_>, index: usize) -> f64 {
    row.values.get(index).copied().filter(|value| value.is_finite()).unwrap_or(0.0)
}

fn line(svg: &mut String, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _written = write!(svg, "<line class=\"axis\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
}

fn text_element(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _written = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(text));
}

/// Formats a number as briefly as possible.
fn short(number: f64) -> String {
    if number.fract() == 0.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}

fn float(count: usize) -> f64 {
    count as f64
}

/// Escapes text for an element or a quoted attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Control characters would be invisible or misread.
            control if control.is_control() => safe.push(' '),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_stacked_and_an_empty_plot_has_none() {
        let rows = || {
            vec![
                PlotSeries { name: "fail", class: "fail", values: vec![1.0, 0.0] },
                PlotSeries { name: "pass", class: "pass", values: vec![3.0, 2.0] },
            ]
        };
        let labels = ["one".to_owned(), "two".to_owned()];
        let svg = bars("Results", &labels, &rows());
        assert_eq!(svg.matches("<rect").count(), 3, "{svg}");
        assert!(svg.contains("aria-label=\"Results: 1 fail, 5 pass\"") && svg.contains("<title>one: 3 pass</title>"));
        // The highest stack, of four, fills the plot: the first bar is a quarter of it.
        assert!(svg.contains("height=\"28.5\"") && svg.contains("height=\"85.5\""), "{svg}");
        let empty = bars("Results", &[], &[]);
        assert!(!empty.contains("NaN") && !empty.contains("<rect"), "{empty}");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("<b a='1'>&\"\u{7}"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot; ");
    }
}
