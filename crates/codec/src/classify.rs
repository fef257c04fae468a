use dewar_units::PAGE_BYTES;

/// What a page's content asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// Zeros only.
    Zero,
    /// Worth compressing.
    Compressible,
    /// As good as random: compressing would cost time and save nothing.
    Incompressible,
}

/// Bytes looked at to tell noise from content, and in how many places.
const SAMPLE: usize = 512;
const PLACES: usize = 16;
/// Sum of squared byte counts above which a sample is not noise. Noise gives
/// `SAMPLE + SAMPLE * (SAMPLE - 1) / 256` = 1,534 with a deviation of 45; text
/// gives 12,000 and more, machine code 5,000 and more.
const NOISE_BELOW: u32 = 1_830;

/// Tells what kind of page this is.
///
/// # Panics
/// Where `page` is not one page long.
pub fn classify(page: &[u8]) -> PageKind {
    assert_eq!(page.len(), PAGE_BYTES);
    if is_zero(page) {
        PageKind::Zero
    } else if is_noise(page) {
        PageKind::Incompressible
    } else {
        PageKind::Compressible
    }
}

/// Whether there are only zeros.
pub fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Whether sampled bytes are spread as evenly as noise: their collision
/// entropy. Samples come from many places, so that a half-filled page is seen.
fn is_noise(page: &[u8]) -> bool {
    let mut counts = [0u16; 256];
    const EACH: usize = SAMPLE / PLACES;
    for (part, nth) in page.chunks_exact(PAGE_BYTES / PLACES).zip(0..) {
        // Elsewhere in each, or records of that size would show one field.
        let start = nth % (PAGE_BYTES / PLACES / EACH) * EACH;
        for &byte in &part[start..start + EACH] {
            counts[usize::from(byte)] += 1;
        }
    }
    counts.iter().map(|&count| u32::from(count) * u32::from(count)).sum::<u32>() < NOISE_BELOW
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        (0..PAGE_BYTES)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            })
            .collect()
    }

    #[test]
    fn kinds_are_told_apart() {
        assert_eq!(classify(&[0; PAGE_BYTES]), PageKind::Zero);
        let mut last = [0; PAGE_BYTES];
        last[PAGE_BYTES - 1] = 1;
        assert_eq!(classify(&last), PageKind::Compressible);
        for seed in 1..200 {
            assert_eq!(classify(&noise(seed)), PageKind::Incompressible);
        }
        let text: Vec<u8> = b"dewar keeps running machines warm; "
            .iter()
            .copied()
            .cycle()
            .take(PAGE_BYTES)
            .collect();
        assert_eq!(classify(&text), PageKind::Compressible);
        let mut half = noise(7);
        half[PAGE_BYTES / 2..].fill(0);
        assert_eq!(classify(&half), PageKind::Compressible);
        // Records that begin with a digest.
        for bytes in [64, 128, 256] {
            let mut records = noise(9);
            records.chunks_exact_mut(bytes).for_each(|record| record[32..].fill(0));
            assert_eq!(classify(&records), PageKind::Compressible, "{bytes}");
        }
    }
}
