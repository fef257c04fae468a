//! Charts as SVG, and text made safe for HTML.

const WIDTH: f64 = 900.0;

/// A piece of a whole.
pub struct Part {
    /// What it is, with its value.
    pub label: String,
    /// Its share, in any unit.
    pub value: f64,
    /// Its class in the style sheet.
    pub class: &'static str,
}

/// One of several bars.
pub struct Bar {
    /// Under it.
    pub label: String,
    /// Shown when it is pointed at.
    pub title: String,
    /// From below: value and class.
    pub parts: Vec<(f64, &'static str)>,
}

/// Text that means only itself in HTML.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// Pieces side by side in proportion, with a legend.
pub fn parts(all: &[Part]) -> String {
    let whole: f64 = all.iter().map(|part| part.value).sum();
    let mut drawn = String::new();
    let mut x = 0.0;
    for part in all {
        let width = WIDTH * part.value / whole.max(f64::MIN_POSITIVE);
        drawn += &rectangle(x, 0.0, width, 36.0, part.class, &part.label);
        x += width;
    }
    svg(36.0, &drawn) + &legend(all)
}

/// Pieces of time side by side. One too short to be seen is marked all the
/// same: the pause is what people look for.
pub fn timeline(all: &[Part]) -> String {
    let whole: f64 = all.iter().map(|part| part.value).sum();
    let mut drawn = String::new();
    let (mut x, mut marks) = (0.0, String::new());
    for part in all {
        let width = WIDTH * part.value / whole.max(f64::MIN_POSITIVE);
        if part.class == "pause" {
            marks += &rectangle(x, 18.0, width.max(2.0), 44.0, part.class, &part.label);
            let anchor = if x > WIDTH / 2.0 { "end" } else { "start" };
            marks += &format!(
                "<text x=\"{x:.1}\" y=\"12\" text-anchor=\"{anchor}\">{}</text>\n",
                escape(&part.label)
            );
        } else {
            drawn += &rectangle(x, 22.0, width, 36.0, part.class, &part.label);
        }
        x += width;
    }
    svg(64.0, &(drawn + &marks)) + &legend(all)
}

/// Bars on one scale; `label` writes a value of it.
pub fn bars(all: &[Bar], unit: &str, label: impl Fn(f64) -> String) -> String {
    const HEIGHT: f64 = 160.0;
    let sum = |bar: &Bar| bar.parts.iter().map(|(value, _)| value).sum::<f64>();
    let most = all.iter().map(sum).fold(0.0, f64::max);
    if all.is_empty() || most == 0.0 {
        return format!("<p>No {unit}.</p>\n");
    }
    let step = WIDTH / all.len() as f64;
    let width = (step * 0.7).min(70.0);
    let mut drawn = String::new();
    for (index, bar) in all.iter().enumerate() {
        let x = step * index as f64 + (step - width) / 2.0;
        let mut y = HEIGHT + 16.0;
        for (value, class) in &bar.parts {
            let height = HEIGHT * value / most;
            y -= height;
            drawn += &rectangle(x, y, width, height, class, &bar.title);
        }
        let middle = x + width / 2.0;
        // As many labels as there is room for.
        let every = all.len().div_ceil(16);
        if index % every == 0 {
            drawn += &format!(
                "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
                 <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
                HEIGHT + 32.0,
                escape(&bar.label),
                y - 4.0,
                escape(&label(sum(bar)))
            );
        }
    }
    drawn += &format!(
        "<line class=\"axis\" x1=\"0\" x2=\"{WIDTH}\" y1=\"{0}\" y2=\"{0}\"/>\n",
        HEIGHT + 16.5
    );
    svg(HEIGHT + 38.0, &drawn)
}

fn svg(height: f64, content: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n{content}</svg>\n")
}

fn rectangle(x: f64, y: f64, width: f64, height: f64, class: &str, title: &str) -> String {
    format!(
        "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" \
         height=\"{height:.2}\"><title>{}</title></rect>\n",
        escape(title)
    )
}

fn legend(all: &[Part]) -> String {
    let entries: String = all
        .iter()
        .map(|part| {
            format!("<span><i class=\"{}\"></i>{}</span>\n", part.class, escape(&part.label))
        })
        .collect();
    format!("<div class=\"legend\">\n{entries}</div>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_become_markup() {
        let part = Part { label: "<script>'\"&".to_owned(), value: 1.0, class: "bulk" };
        let drawn = parts(&[part]);
        assert!(!drawn.contains("<script>"));
        assert!(drawn.contains("&lt;script&gt;&#39;&quot;&amp;"));
    }

    #[test]
    fn nothing_to_draw_is_said() {
        assert_eq!(bars(&[], "pages", |it| it.to_string()), "<p>No pages.</p>\n");
        assert!(parts(&[]).contains("<svg"));
    }
}
